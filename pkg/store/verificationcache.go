// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// VerificationCache is what the last ADD of a network verified: that its entry is valid and is the network's
// document, and that the rules in the kernel were those that the documents ask for. An ADD with an equal
// Entry and equal Inputs need not validate its entry, and an ADD, DEL or GC that also finds the same
// Generation need not read rules. The active reconciler writes one for all of them. The file is beside the
// document and is written without the lock: after a torn or lost one the next ADD verifies again. CHECK,
// STATUS and the reconciler never use it. iptables-legacy never writes it, as the kernel counts no changes
// there.
type VerificationCache struct {
	// Entry is the Digest of the entry, the pod's subnets and the program. In what the reconciler
	// published, which is not about an entry, it is the version of the program. Without white space.
	Entry      string
	Inputs     string // Digest of the documents, the record and the program
	Generation string // of the ruleset; without white space
	Addresses  string // those of the node that the rules depend on, "" for none; without white space
}

func verificationCacheName(src policy.SourceID) string {
	return strings.TrimSuffix(nameOf(src), documentSuffix) + verificationCacheSuffix
}

// Digest returns a hash of texts. Different lists of texts have different digests.
func Digest(texts ...string) string { return hashName("verified", texts...) }

// Digest returns a hash of all that was read, or "" if a file is refused.
func (r *Reading) Digest() string {
	if r.digest == "" {
		texts := make([]string, 0, 2*len(r.files))
		for _, f := range r.files {
			if f.err != nil {
				return ""
			}
			texts = append(texts, f.name, string(f.data))
		}
		r.digest = Digest(texts...)
	}
	return r.digest
}

// reconciler is the name of the cache that the active reconciler writes for ADDs, DELs and GCs of all
// networks. Its Entry is the version of the program: only a plugin of the same version uses it.
func reconciler() policy.SourceID { return policy.SourceID{Kind: "reconciler"} }

// Published returns what the reconciler verified, or the zero value.
func (d *Dir) Published() VerificationCache { return d.VerificationCache(reconciler()) }

// Publish writes what the reconciler verified.
func (d *Dir) Publish(c VerificationCache) error { return d.PutVerificationCache(reconciler(), c) }

// VerificationCache returns that of a source, or the zero value if it cannot be read or trusted.
func (d *Dir) VerificationCache(src policy.SourceID) VerificationCache {
	sources, err := d.descend(false, sourcesDir)
	if err != nil {
		return VerificationCache{}
	}
	defer sources.close()
	data, err := sources.read(verificationCacheName(src))
	if err != nil {
		return VerificationCache{}
	}
	return decodeVerificationCache(data)
}

// encode returns the content of the file.
func (c VerificationCache) encode() []byte {
	return fmt.Appendf(nil, "%s %s %s %s\n", c.Entry, c.Inputs, c.Generation, c.Addresses)
}

// decodeVerificationCache decodes a file that was written whole, and returns the zero value for any other.
func decodeVerificationCache(data []byte) VerificationCache {
	line, whole := strings.CutSuffix(string(data), "\n")
	fields := strings.Split(strings.TrimRight(line, "\n"), " ") // see overwrite
	if !whole || len(fields) != 4 {
		return VerificationCache{}
	}
	return VerificationCache{fields[0], fields[1], fields[2], fields[3]}
}

// PutVerificationCache writes that of a source, in place, beside the documents, of which there has to be
// one. A concurrent reader gets this one, the previous one or none.
func (d *Dir) PutVerificationCache(src policy.SourceID, c VerificationCache) error {
	const op = "write verification cache"
	sources, err := d.descend(false, sourcesDir)
	if err != nil {
		return err
	}
	defer sources.close()
	name := verificationCacheName(src)
	file, _, err := sources.open(op, name, unix.O_WRONLY)
	if err != nil { // it is absent, or not trusted
		if err := sources.remove(name); err != nil {
			return err
		}
		file, err = sources.create(op, name, name)
	}
	if err != nil {
		return err
	}
	return failure(op, sources.in(name), overwrite(file, c.encode()))
}
