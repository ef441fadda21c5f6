"""Probes: everything in the toolkit that has fitted parameters (sparse autoencoders to come)."""
