"""The server on a Ray cluster: replicas of models, and one ingress that keeps turns."""
