"""SmolVL: a vision-language model of 136 million weights that answers in words, made offline from two packages."""
