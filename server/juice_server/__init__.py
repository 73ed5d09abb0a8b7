"""The JuICE server: steering per request over HTTP."""
