"""A metadata service on loopback with given replies, which records the requests."""

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """One reply."""

    status: int = 200
    body: str | bytes = ""
    headers: dict[str, str] = field(default_factory=dict)
    hang_s: float = 0.0
    drip_s: float = 0.0


class MetadataServer:
    """Serves `replies` and records the requests in `requests` as (method, path, headers).

    `replies` maps a path without its query to a Reply, or to a function that makes one from the request; other paths
    are answered with 404.
    """

    def __init__(self):
        self.replies = {}
        self.requests = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                service.requests.append((self.command, self.path, dict(self.headers)))
                reply = service.replies.get(self.path.partition("?")[0], Reply(404))
                reply = reply(self) if callable(reply) else reply
                time.sleep(reply.hang_s)
                body = reply.body if isinstance(reply.body, bytes) else reply.body.encode()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in [body[n : n + 1] for n in range(len(body))] if reply.drip_s else [body]:
                    time.sleep(reply.drip_s)
                    self.wfile.write(piece)

            do_GET = do_PUT = answer  # noqa: N815

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                pass  # a client that reached its time limit has closed the connection

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def paths(self):
        """The requested paths, without their queries."""
        return [path.partition("?")[0] for _, path, _ in self.requests]

    def close(self):
        self._server.shutdown()
        self._server.server_close()
