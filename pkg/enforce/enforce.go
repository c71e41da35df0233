// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Enforcer syncs the rules of one node, which is a dataDir and the network namespace of the
// process.
type Enforcer struct {
	Dir     *store.Dir
	Drivers netfilter.Drivers
	// Warn is called with errors that do not fail the work at hand, and with nil.
	Warn func(error)
	// Owned returns the chains and guard tables that name an owner. Nil reads them from the kernel.
	Owned func(context.Context) ([]netfilter.OwnedChain, error)
	// Conntrack deletes the connections that a judge calls stale, and returns how many there were.
	Conntrack func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error)
	// Addresses returns the addresses of the node, of these families.
	Addresses func([]policy.Family) ([]policy.NodeAddress, error)
	// Reread, RereadExempt and RereadAll tell which records of pods are read again to find out which pods are
	// exempt: those of some attachments, those of all pods that are exempt by the stored record, and those of
	// all pods. What the stored record has of other pods counts as it is. They do not change while the
	// Enforcer is used.
	Reread                  []store.Attachment
	RereadExempt, RereadAll bool
	// AllBackends makes Observe look for chains of the same names in the other backends, where an
	// agent may have created them, and for chains of other dataDirs.
	AllBackends bool

	chosen map[string]netfilter.Choice // by chain, of those that are not on record
}

// Inputs returns a digest of everything that determines the desired rules, for a program and a plugin.toml.
// It is "" if a file is refused, or the boot or the program is unknown.
func (e *Enforcer) Inputs(r *store.Reading, program string, pluginFile any) string {
	digest, boot := r.Digest(), e.Dir.Boot()
	if program == "" || digest == "" || boot == "" {
		return ""
	}
	return store.Digest(digest, program, e.Dir.Path(), boot, fmt.Sprint(pluginFile))
}

// HasGeneration reports whether the kernel counts the changes of all owned chains.
func HasGeneration(rec store.Record) bool {
	for _, o := range rec.Chains {
		if !ChoiceOf(o).HasGeneration() {
			return false
		}
	}
	return true
}

// Verified returns the result of an observation for a verification cache. It is the zero value unless the
// rules are those that the documents ask for, and stay correct while the inputs and the generation are
// unchanged. The generation is from before the rules were read.
func (s *State) Verified(inputs, generation string) store.VerificationCache {
	if inputs == "" || generation == "" || !HasGeneration(s.onRecord.now) || !s.InSync() {
		return store.VerificationCache{}
	}
	// While resets are on record, each ADD looks whether a reconciler makes them, which may have ended.
	if len(s.onRecord.now.Resets) > 0 {
		return store.VerificationCache{}
	}
	return store.VerificationCache{Inputs: inputs, Generation: generation, Addresses: s.AddressDigest()}
}

// CanWrite returns why rules could not be written or removed now, as far as that is known without writing.
func (e *Enforcer) CanWrite(ctx context.Context, c netfilter.Choice, families ...policy.Family) error {
	b, err := e.Drivers.Open(c)
	if err != nil {
		return err
	}
	for _, f := range families {
		if err := b.CanWrite(ctx, f); err != nil {
			return err
		}
	}
	return nil
}
