"""Commands of the repository that are neither the product nor the lab."""
