"""Watch over what the task does to parameters, generators and other ranks while it trains."""
