"""Scheduling of requests and tokens into forwards; pure, without a model."""
