"""Tests beside other programs: browsers, clients, container engines, proxies, clusters."""
