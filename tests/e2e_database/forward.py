"""Forwards TCP connections to the port that a file names, as an address that moves does.

Usage: forward.py PORT FILE. A connection stays where it leads when the file changes. While the file names port 0, what
is sent on new and old connections is swallowed, and nothing is answered.
"""

import asyncio
import sys


def target():
    with open(sys.argv[2], encoding="utf-8") as file:
        return int(file.read())


async def pipe(reader, writer):
    try:
        while data := await reader.read(65536):
            if target() == 0:
                # This connection has a hole in it from now on.
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def serve(reader, writer):
    port = target()
    if port == 0:
        await asyncio.Event().wait()
    try:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(pipe(reader, server_writer), pipe(server_reader, writer))


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    async with server:
        await server.serve_forever()


asyncio.run(main())
