"""HTTP server: OpenAI's API, metrics, and a chat page.

`config` reads the configuration, `lifecycle` starts and stops the server, `app` assembles `routes`,
`schemas` defines request bodies, `requests` builds engine requests from them, `stream` turns the
engine's tokens into responses, `middleware` enforces authentication and limits.  Needs the extra
`serve`; only `nbflow.compat` and `nbflow.cli` import this package.
"""
