// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// VerificationCache is what the last ADD of a network verified: that its entry is valid and
// is the network's document, and that the rules in the kernel were those that the documents
// ask for. It holds digests of the entry and of everything else that the result depended on,
// and the generation of the nf_tables ruleset. An ADD with equal digests need not validate
// its entry, and an ADD, DEL or GC that also finds the same generation need not read rules.
// The file is beside the document; it is written without the lock, and a torn or lost one
// only means that the next ADD verifies again. CHECK, STATUS and the reconciler never use
// it, and iptables-legacy, whose changes the kernel does not count, never writes it.
type VerificationCache struct {
	Entry      string // Digest of the entry and the program
	Inputs     string // Reading.Digest of the documents, the record and the program
	Generation string // of the ruleset; without white space
}

func verificationCacheName(src policy.SourceID) string {
	return strings.TrimSuffix(nameOf(src), documentSuffix) + verificationCacheSuffix
}

// Digest returns a hash of texts. Different lists of texts have different digests.
func Digest(texts ...string) string { return hashName("verified", texts...) }

// Digest returns a hash of all that was read and of other texts, or "" if something that
// was read is refused or damaged.
func (r *Reading) Digest(others ...string) string {
	texts := make([]string, 0, 2*len(r.documents)+2+len(others))
	for _, f := range r.documents {
		if f.err != nil {
			return ""
		}
		texts = append(texts, f.name, string(f.data))
	}
	texts = append(texts, "") // the name of no document
	record := ""              // an empty record is damaged, so the rules are never verified with it
	if r.record != nil {
		if r.record.err != nil {
			return ""
		}
		record = string(r.record.data)
	}
	return Digest(append(append(texts, record), others...)...)
}

// VerificationCache returns that of the source that Read was called for, or the zero value.
func (r *Reading) VerificationCache() VerificationCache { return r.verified }

// VerificationCache reads that of a source alone.
func (d *Dir) VerificationCache(src policy.SourceID) VerificationCache {
	sources, err := d.descend(false, sourcesDir)
	if err != nil {
		return VerificationCache{}
	}
	defer sources.close()
	return sources.verificationCache(src)
}

// verificationCache reads the file. If it cannot be read or trusted, the result is zero.
func (f *folder) verificationCache(src policy.SourceID) VerificationCache {
	const size = 256 // bytes, more than any has
	fd, _, err := f.open("read verification cache", verificationCacheName(src), unix.O_RDONLY)
	if err != nil {
		return VerificationCache{}
	}
	defer func() { _ = unix.Close(fd) }()
	data, err := readAll(fd, size)
	line, whole := strings.CutSuffix(string(data), "\n")
	fields := strings.Fields(line)
	if err != nil || !whole || len(fields) != 3 {
		return VerificationCache{}
	}
	return VerificationCache{fields[0], fields[1], fields[2]}
}

// PutVerificationCache writes that of a source that has a document, in place: a concurrent
// reader gets this one, the last one or a torn one.
func (d *Dir) PutVerificationCache(src policy.SourceID, c VerificationCache) error {
	const op = "write verification cache"
	sources, err := d.descend(false, sourcesDir)
	if err != nil {
		return err
	}
	defer sources.close()
	name := verificationCacheName(src)
	fd, _, err := sources.open(op, name, unix.O_WRONLY)
	if err != nil { // it is absent, or not trusted
		if err = sources.remove(name); err == nil {
			fd, err = sources.create(op, name)
		}
	}
	if err != nil {
		return err
	}
	text := fmt.Appendf(nil, "%s %s %s\n", c.Entry, c.Inputs, c.Generation)
	n, err := unix.Pwrite(fd, text, 0)
	if err == nil {
		err = unix.Ftruncate(fd, int64(n))
	}
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return failure(op, sources.in(name), err)
	}
	return nil
}
