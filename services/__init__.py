"""The services of hotset and the contract between them."""
