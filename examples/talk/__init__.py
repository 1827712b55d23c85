"""SmolVL: a vision-language model with 136 million weights that answers in words, built offline from two packages."""
