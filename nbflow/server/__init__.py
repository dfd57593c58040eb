"""The service: OpenAI's API, Inferflow's, metrics, and a chat page.

`config` is what it is told, `serving` starts and ends it, `app` lists the endpoints (`chat`,
`completions`, `embeddings`, `tokens`, `status`, `native`), `fields` is what their bodies hold,
`requests` and `job` lead to the engine and back, `middleware` holds the limits of every request.
Needs the extra `serve`; nothing outside this package imports it but the command.
"""
