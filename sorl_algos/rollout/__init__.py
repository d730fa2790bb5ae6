"""Rollouts: engines that sample tokens, the renderer, the collector and the sources the trainer iterates."""
