"""Integer programs by HiGHS: the order, the addresses, both at once."""
