"""The OpenAI-compatible HTTP process: text in, text out. It meets engines only through engine.proto."""
