"""What clients may say and what they are told: the request and answer bodies of every route."""
