"""Draft networks made of another one: DFlash's block with more in its layers and behind them."""
