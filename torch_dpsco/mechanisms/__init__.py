"""Releases other than noisy means: each mechanism samples its own law and says what it costs."""
