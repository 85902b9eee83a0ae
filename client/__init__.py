"""The client library: what a program that wants answers imports."""
