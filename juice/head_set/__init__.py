"""Head sets: the file format, folders of them, and their exchange with the hub and other tools."""
