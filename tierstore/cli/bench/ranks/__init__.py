"""Benchmarks of several real ranks, on links that are limited where time counts; one file a command."""
