"""Commands that a run never needs: plan, import-config, data sets, published recipes, workflows, probes, saliency."""
