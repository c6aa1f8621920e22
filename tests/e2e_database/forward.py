"""Forwards TCP connections to the port that a file names, as an address that moves does.

Usage: forward.py PORT FILE. A connection stays where it leads when the file changes. While the file names port 0, what
is sent on new and old connections is swallowed, and nothing is answered.
"""

import asyncio
import sys


def target():
    with open(sys.argv[2], encoding="utf-8") as file:
        return int(file.read())


# What connections in a hole wait for. Without a reference, they would be collected as garbage.
holes = []


async def hole():
    """Never returns. The program ends by a signal, with all of its connections."""
    holes.append(asyncio.get_running_loop().create_future())
    await holes[-1]


async def pipe(reader, writer):
    try:
        while data := await reader.read(65536):
            if target() == 0:
                # This connection has a hole in it from now on.
                await hole()
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def serve(reader, writer):
    port = target()
    if port == 0:
        await hole()
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
