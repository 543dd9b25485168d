"""Helpers that several test modules share: generators and oracles."""
