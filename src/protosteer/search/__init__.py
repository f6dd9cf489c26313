"""Candidates among very many classes."""
