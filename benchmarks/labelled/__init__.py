"""Labelled logs of real trainings, and what they are measured with."""
