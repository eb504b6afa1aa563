"""Every private name of torch that is used, and what happens where one fails."""
