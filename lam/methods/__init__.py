"""One file a system: how it trains, and the encoder that it hands back."""
