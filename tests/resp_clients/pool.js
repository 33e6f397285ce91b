// Runs each command over a connection that is borrowed from a pool of generic-pool: `pool.js MODULE PORT PASSWORD`.
const shown = require('./shown')
const [name, port, password] = [process.argv[2], Number(process.argv[3]), process.argv[4] || undefined]
const library = require(name)
const isIoredis = name === 'ioredis'

const pool = require('generic-pool').createPool(
  {
    create: async () => {
      if (isIoredis) return new library({ port, password })
      const redis = library.createClient({ socket: { port }, password })
      await redis.connect()
      return redis
    },
    validate: async (redis) => (await redis.ping()) === 'PONG',
    destroy: (redis) => redis.quit(),
  },
  { max: 4, testOnBorrow: true },
)

async function run(words) {
  try {
    return shown(await pool.use((redis) => (isIoredis ? redis.call(...words) : redis.sendCommand(words))))
  } catch (error) {
    return 'error ' + error.message
  }
}

let previous = Promise.resolve()
require('readline').createInterface({ input: process.stdin }).on('line', (line) => {
  const words = line.split('\t').slice(1)
  previous = previous.then(async () => console.log(await run(words)))
}).on('close', () => previous.then(() => process.exit(0)))
