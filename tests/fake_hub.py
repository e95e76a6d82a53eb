"""A hub on loopback with one bucket, as far as `HfApi` calls it; the content is kept where hf_xet itself writes it.

hf_xet takes a folder of this machine as the address of the content-addressed store (`local://PATH`), so the real
client cuts, uploads, looks up and rebuilds files here. The forms of requests and answers are those that
huggingface_hub 2.4 sends and expects: `HfApi.batch_bucket_files`, `list_bucket_tree`, `get_bucket_paths_info`,
`get_bucket_file_metadata`, `bucket_info`.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from hf_xet import XetFileInfo, XetSession

BUCKET = "user/bucket"
TOKEN = "hf_" + "not0a0real0secret" * 2
PAGE = 3
"""Entries of one page of a listing: so few that each listing has several pages."""


class FakeHub:
    """Serves the bucket `user/bucket`.

    `files` maps a path to the hash and the size of its content, `requests` has (method, path) of each request, and
    `operations` what the batches did. A call that begins with a prefix in `failing` is answered with its status.
    """

    def __init__(self, folder):
        self.store = f"local://{folder}"
        self.files = {}
        self.requests = []
        self.operations = []
        self.failing = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def serve(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.requests.append((self.command, self.path))
                status, value, headers = hub.answer(self.path, self.headers, body)
                content = json.dumps(value).encode()
                self.send_response(status)
                for name, text in headers.items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = serve  # noqa: N815

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path, headers, body):
        """Return the status, the JSON value and the headers of an answer."""
        address = urlsplit(path)
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}, {}
        for prefix, status in self.failing.items():
            if address.path.startswith(prefix):
                return status, {"error": "as the test wants it"}, {}
        if address.path.startswith(f"/buckets/{BUCKET}/resolve/"):
            return self._resolve(unquote(address.path.split("/resolve/", 1)[1]))
        kind, _, rest = address.path.removeprefix(f"/api/buckets/{BUCKET}").lstrip("/").partition("/")
        if not address.path.startswith(f"/api/buckets/{BUCKET}"):
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if kind == "":
            facts = {"id": BUCKET, "private": True, "createdAt": "2026-01-01T00:00:00.000Z", "size": 0}
            return 200, facts | {"totalFiles": len(self.files)}, {}
        if kind in ("xet-write-token", "xet-read-token"):
            return self._token()
        if kind == "batch":
            return self._batch([json.loads(line) for line in body.splitlines()])
        if kind == "paths-info":
            known = [one for one in json.loads(body)["paths"] if one in self.files]
            return 200, [self._file(one) for one in known], {}
        assert kind == "tree", path
        return self._tree(unquote(rest), parse_qs(address.query))

    def _token(self):
        expires = int(time.time()) + 3600
        value = {"casUrl": self.store, "exp": expires, "accessToken": "of-the-store"}
        names = ("X-Xet-Cas-Url", "X-Xet-Token-Expiration", "X-Xet-Access-Token")
        return 200, value, dict(zip(names, map(str, value.values()), strict=True))

    def _batch(self, operations):
        for operation in operations:
            kind, path = operation["type"], operation["path"]
            self.operations.append((kind, path))
            if kind == "deleteFile":
                del self.files[path]
            else:
                self.files[path] = (operation["xetHash"], self._size(operation["xetHash"]))
        return 200, {"success": True, "processed": len(operations), "succeeded": len(operations), "failed": []}, {}

    def _size(self, content_hash):
        known = dict(self.files.values())
        if content_hash not in known:
            with XetSession().new_download_stream_group(endpoint=self.store) as group:
                known[content_hash] = sum(map(len, group.download_stream(XetFileInfo(content_hash))))
        return known[content_hash]

    def _file(self, path):
        content_hash, size = self.files[path]
        return {"type": "file", "path": path, "size": size, "xetHash": content_hash}

    def _resolve(self, path):
        if path not in self.files:
            return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
        content_hash, size = self.files[path]
        refresh = f"{self.url}/api/buckets/{BUCKET}/xet-read-token"
        headers = {"X-Xet-Hash": content_hash, "X-Linked-Size": str(size), "X-Xet-Refresh-Route": refresh}
        return 200, None, headers

    def _tree(self, prefix, query):
        """List a page of what begins with `prefix`, letter by letter, as the hub does: `run` finds `run2/…` too."""
        entries = {}
        for path in sorted(path for path in self.files if path.startswith(prefix)):
            start = len(prefix) + 1 if prefix and path.startswith(f"{prefix}/") else len(prefix)
            cut = path.find("/", start)
            if cut == -1 or query.get("recursive", ["false"])[0].lower() == "true":
                entries[path] = self._file(path)
            else:
                entries[path[:cut]] = {"type": "directory", "path": path[:cut]}
        first = int(query.get("from", ["0"])[0])
        page = list(entries.values())[first : first + PAGE]
        if first + PAGE >= len(entries):
            return 200, page, {}
        recursive = query.get("recursive", ["false"])[0]
        encoded = f"/{prefix}" if prefix else ""
        following = f"{self.url}/api/buckets/{BUCKET}/tree{encoded}?recursive={recursive}&from={first + PAGE}"
        return 200, page, {"Link": f'<{following}>; rel="next"'}
