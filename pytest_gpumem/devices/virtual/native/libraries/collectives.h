/* collectives.c: what collectives make of the bytes that ranks give to them */
#ifndef GPUMEM_COLLECTIVES_H
#define GPUMEM_COLLECTIVES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ncclDataType_t, ncclRedOp_t; lower precisions are not calculated with */
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum { SUM, PROD, MAX, MIN, AVG };

uint64_t gm_element_size(int type);
/* Reduces the elements of all ranks from a byte on; false where a rank's are unknown (NULL), or of low precision. */
bool gm_reduce(const unsigned char *const *given, int ranks, unsigned char *to, uint64_t at, size_t count, int type,
               int operation);

typedef enum { GM_BROADCAST, GM_REDUCE, GM_ALL_REDUCE, GM_ALL_GATHER, GM_REDUCE_SCATTER } gm_collective_kind;

typedef struct {
    gm_collective_kind kind;
    size_t count; /* of elements, as NCCL's function has it */
    int type, operation, root;
} gm_collective;

/* Ranks that are devices of this process. */
typedef struct gm_company gm_company;

gm_company *gm_company_new(int ranks); /* NULL: no memory for it */
void gm_company_leave(gm_company *company);
/* A rank comes to its next collective; the last one of the ranks carries it out. */
bool gm_company_meet(gm_company *company, int rank, gm_collective collective, const void *from, void *to);

#endif
