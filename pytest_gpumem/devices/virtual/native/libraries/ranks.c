/* Ranks that are processes of one machine share an unnamed file, created by the rank that names the world, with a slot
 * for each rank. The others open it through /proc. A rank writes the bytes that it contributes, and its turn; it
 * continues when all ranks have written theirs. It alternates between two buffers: no rank is two turns behind. Ranks
 * wait for each other as with NCCL, where the host waits when it reads a result. A rank that has left, or ended,
 * contributes nothing more. */
#define _GNU_SOURCE
#include "libraries/ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 256 };
enum { PAUSE_NS = 100000, MAX_PAUSES = 6000000 }; /* ten minutes, after which PyTorch gives up on NCCL's ranks */

typedef struct {
    bool known;
    unsigned char bytes[GM_EXCHANGED];
} room;

typedef struct {
    _Atomic pid_t process; /* 0: it has not joined yet */
    atomic_bool left;
    atomic_ullong turn;
    room rooms[2];
} place;

struct gm_world {
    place *places; /* NULL: the others cannot be reached, and their bytes are unknown */
    int ranks, rank;
    int file; /* of the process that created it; otherwise -1 */
    uint64_t turn;
    bool lost; /* a rank ended or did not join */
};

typedef struct {
    char mark[8];
    pid_t process;
    int file;
} name_fields;

static const char MARK[8] = "gpumem";

void gm_world_name(char name[GM_WORLD_NAME]) {
    memset(name, 0, GM_WORLD_NAME);
    if (getenv("GPUMEM_LONE_RANK")) return;
    name_fields fields = {.process = getpid()};
    memcpy(fields.mark, MARK, sizeof MARK);
    fields.file = (int)syscall(SYS_memfd_create, "gpumem-ranks", 1u /* MFD_CLOEXEC */);
    memcpy(name, &fields, sizeof fields);
}

gm_world *gm_world_join(const char name[GM_WORLD_NAME], int ranks, int rank) {
    name_fields fields;
    memcpy(&fields, name, sizeof fields);
    if (memcmp(fields.mark, MARK, sizeof MARK) != 0) return NULL;
    bool own = fields.process == getpid();
    if (own && ranks == 1) close(fields.file);
    gm_world *w = ranks > 1 ? calloc(1, sizeof *w) : NULL;
    if (!w) return NULL;
    *w = (gm_world){.ranks = ranks, .rank = rank, .file = own ? fields.file : -1};
    if (ranks > MAX_RANKS) return w;
    int file = fields.file;
    if (!own) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)fields.process, file);
        file = open(path, O_RDWR | O_CLOEXEC);
    }
    size_t size = sizeof(place) * (size_t)ranks;
    void *map = file >= 0 && ftruncate(file, (off_t)size) == 0
                    ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                    : MAP_FAILED;
    if (file >= 0 && file != w->file) close(file);
    if (map != MAP_FAILED) {
        w->places = map;
        atomic_store(&w->places[rank].process, getpid());
    }
    return w;
}

void gm_world_leave(gm_world *w) {
    if (!w) return;
    if (w->places) {
        atomic_store(&w->places[w->rank].left, true);
        munmap(w->places, sizeof(place) * (size_t)w->ranks);
    }
    if (w->file >= 0) close(w->file);
    free(w);
}

/* Waits until a rank has written its bytes for the world's turn; returns whether it has. */
static bool await_rank(const gm_world *w, place *p) {
    const struct timespec pause = {0, PAUSE_NS};
    for (int pauses = 0; atomic_load(&p->turn) < w->turn; pauses++) {
        pid_t process = atomic_load(&p->process);
        bool ended = atomic_load(&p->left) || (process && kill(process, 0) != 0 && errno == ESRCH);
        if ((ended && atomic_load(&p->turn) < w->turn) || pauses == MAX_PAUSES) return false;
        nanosleep(&pause, NULL);
    }
    return true;
}

void gm_world_exchange(gm_world *w, const void *bytes, uint64_t size) {
    if (!w->places || w->lost) return;
    place *own = &w->places[w->rank];
    room *r = &own->rooms[++w->turn % 2];
    r->known = bytes != NULL;
    if (bytes) memcpy(r->bytes, bytes, size);
    atomic_store(&own->turn, w->turn);
    for (int rank = 0; rank < w->ranks; rank++)
        if (rank != w->rank && !await_rank(w, &w->places[rank])) w->lost = true;
}

const unsigned char *gm_world_bytes(const gm_world *w, int rank) {
    if (!w->places || w->lost) return NULL;
    const room *r = &w->places[rank].rooms[w->turn % 2];
    return r->known ? r->bytes : NULL;
}
