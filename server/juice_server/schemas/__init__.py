"""The bodies of requests and answers, one protocol a file."""
