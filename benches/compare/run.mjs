// One queue of Node.js does so many empty jobs with so many workers, and says how long that took:
//
//     node run.mjs graphile-worker|pg-boss JOBS WORKERS
//
// The database is named by PGHOST, PGPORT, PGUSER and PGDATABASE. Jobs are put in before the clock starts; it stops when
// the last one is recorded as done. Both are used as their manuals show, but for two things: graphile-worker's
// log is silent, and this script requests the next job from pg-boss as soon as one is done, because the workers of
// pg-boss wait at least half a second between two.
import { createRequire } from "node:module";

import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";
import PgBoss from "pg-boss";

const [, , name, jobsText, workersText] = process.argv;
const jobs = Number(jobsText);
const workers = Number(workersText);
const version = createRequire(import.meta.url)(`${name}/package.json`).version;

async function graphileWorker() {
  const pgPool = new pg.Pool({ max: workers + 2 });
  pgPool.on("error", () => {});
  const logger = new Logger(() => () => {});
  const utils = await makeWorkerUtils({ pgPool, logger });
  await utils.migrate();
  await pgPool.query(
    "SELECT graphile_worker.add_job('cycle', json_build_object('n', n)) FROM generate_series(1, $1) n",
    [jobs],
  );
  await pgPool.query("VACUUM ANALYZE");
  let done = 0;
  const began = process.hrtime.bigint();
  const runner = await run({
    pgPool,
    logger,
    concurrency: workers,
    noHandleSignals: true,
    taskList: { cycle: async () => void (done += 1) },
  });
  const left = async () =>
    (await pgPool.query("SELECT EXISTS (SELECT 1 FROM graphile_worker.jobs) AS left")).rows[0].left;
  while (done < jobs || (await left())) {
    await new Promise((resolve) => setTimeout(resolve, 2));
  }
  const took = process.hrtime.bigint() - began;
  await runner.stop();
  await utils.release();
  await pgPool.end();
  return [done, took];
}

async function pgBoss() {
  const boss = new PgBoss({
    host: process.env.PGHOST,
    port: Number(process.env.PGPORT),
    user: process.env.PGUSER,
    database: process.env.PGDATABASE,
    max: workers,
    supervise: false,
    schedule: false,
  });
  await boss.start();
  await boss.createQueue("cycle");
  await boss.insert(Array.from({ length: jobs }, (_, n) => ({ name: "cycle", data: { n } })));
  const client = new pg.Client();
  await client.connect();
  await client.query("VACUUM ANALYZE");
  await client.end();
  let done = 0;
  const worker = async () => {
    for (;;) {
      const [job] = (await boss.fetch("cycle")) ?? [];
      if (job === undefined) {
        return;
      }
      await boss.complete("cycle", job.id);
      done += 1;
    }
  };
  const began = process.hrtime.bigint();
  await Promise.all(Array.from({ length: workers }, worker));
  const took = process.hrtime.bigint() - began;
  await boss.stop({ graceful: false, wait: true });
  return [done, took];
}

const [done, took] = await { "graphile-worker": graphileWorker, "pg-boss": pgBoss }[name]();
console.log(JSON.stringify({ version, done, seconds: Number(took) / 1e9 }));
