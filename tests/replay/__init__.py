"""Command lines whose figures stay the same, digit by digit, whatever is rebuilt behind them."""
