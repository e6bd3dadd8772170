"""Panels of the page as figures for print, and as the Python code that draws them."""
