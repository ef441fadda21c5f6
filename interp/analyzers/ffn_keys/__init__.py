"""The FFN as a key-value memory (Geva et al. 2021): triggers, values, and what kind of patterns."""
