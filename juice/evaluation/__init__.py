"""Evaluation: does steering beat its baselines on this model and data, and what does it break?"""
