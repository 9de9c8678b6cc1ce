"""What a trained model is worth: perplexity by the bound."""
