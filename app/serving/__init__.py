"""A model behind OpenAI's chat API: requests read and refused by name, one answer at a time.

`requests` knows the API's words and no server, `application` the paths, `access` who may use them,
`answers` the queue, `server` HTTP; chat.html is the page at `/`. What is generated, and from which
tokens, is evaluation's `Responder`.
"""
