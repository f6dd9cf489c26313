// Answers from the cache, so that the page works without a network. Each export has a version of its own.
const VERSION = "{{version}}", FILES = {{files}};
const PREFIX = `protosteer ${self.registration.scope} `, CACHE = PREFIX + VERSION;

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(FILES)).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const old = (name) => name.startsWith(PREFIX) && name !== CACHE;
  const cleared = caches.keys().then((names) => Promise.all(names.filter(old).map((name) => caches.delete(name))));
  event.waitUntil(cleared.then(() => self.clients.claim()));
});

self.addEventListener("fetch", (event) => {
  if (event.request.method === "GET") event.respondWith(answer(event.request));
});

async function answer(request) {
  const cache = await caches.open(CACHE), stored = await cache.match(request, { ignoreSearch: true });
  if (stored) return stored;
  const fresh = await fetch(request);
  if (fresh.ok) await cache.put(request, fresh.clone()).catch(() => {}); // no room: the page goes on
  return fresh;
}
