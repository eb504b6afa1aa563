"""Dynamo's graphs of a loss function, and its guards."""
