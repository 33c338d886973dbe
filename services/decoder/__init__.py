"""The decoder: everything that touches the device, and the OpenAI front."""
