"""What each `dsc` command does, by kind; compiler/cli.py puts them together."""
