// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"fmt"
	"maps"
	"reflect"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Conflists is the runtimes' configuration directory. Functions return it, because most ADDs do not need to
// read it.
type Conflists interface {
	// HasEntry reports whether a conflist has a plugin entry for the network.
	HasEntry(network string) bool
	// LacksEntry reports whether no conflist has a plugin entry for the network. It is false if a file of the
	// directory cannot be read.
	LacksEntry(network string) bool
	// HasEntryWith reports whether that entry states this policy.
	HasEntryWith(network string, s policy.SourcePolicy) bool
}

// Proposal is the set of documents to store. It begins with those that are stored.
type Proposal struct {
	Sources []policy.Source
	Changed []policy.Source // those that differ from what is stored
	// Lost are the documents that cannot be read and are not written again, so their sources are missing, and
	// everything that exists stays.
	Lost []store.FileError

	policies []policy.Policy // merged from the sources, or nil
}

// Find returns the source, or nil.
func (p *Proposal) Find(id policy.SourceID) *policy.Source {
	return store.State{Sources: p.Sources}.Find(id)
}

// Chain returns the chain of a source, or "".
func (p *Proposal) Chain(id policy.SourceID) string {
	source := p.Find(id)
	if source == nil {
		return ""
	}
	return source.Policy.Chain
}

// Add adds or replaces a source. If the policy of a network is older than the conflist on disk, Add keeps the
// stored policy. If it conflicts with a network that is in no conflist, that network is superseded. The
// PodSubnets of a network are added to those that are stored; a network with a ConfDir has none. The error
// has the conflicts that remain, or a bound that is exceeded; the proposal is then unchanged.
func (p *Proposal) Add(own policy.Source, disk func() Conflists, warn func(error)) error {
	next := *p
	if own.ID.Kind != policy.Network {
		if stored := p.Find(own.ID); stored != nil && reflect.DeepEqual(*stored, own) {
			return nil
		}
		next.set(own)
		return p.takeOver(next, own)
	}
	network := p.network(own, 1+lastOrder(p.Sources), disk, warn)
	if network.isWritten {
		next.set(network.source)
	}
	if err := next.resolve(network.source, disk, warn); err != nil {
		return err
	}
	if network.policyChanges {
		return p.takeOver(next, network.source)
	}
	*p = next
	return nil
}

// proposedNetwork is what a network becomes.
type proposedNetwork struct {
	source        policy.Source
	policyChanges bool
	isWritten     bool // its document changes
}

// network returns what a network becomes. An ADD with an older entry than the conflist has still a pod with
// these subnets: pods that run when a guard is turned on make no further ADD, so subnets count whatever the
// entry says. With a plugin.toml none counts, as anybody may choose the addresses in an entry.
func (p *Proposal) network(
	own policy.Source, order int64, disk func() Conflists, warn func(error),
) proposedNetwork {
	stored := p.Find(own.ID)
	changes := stored == nil || !stored.Policy.Equal(own.Policy)
	if changes && stored != nil && disk().HasEntryWith(own.ID.Name, stored.Policy) {
		warn(fmt.Errorf("%s: this ADD has an older entry than the conflist on disk, which stays in force",
			own.ID))
		changes = false
	}
	next := own
	if changes {
		next.Order = order // after the sources that are in force
	} else {
		next = *stored
	}
	next.PodSubnets = nil
	hasPluginFile := own.ConfDir != ""
	hasNewSubnet := false
	if !hasPluginFile {
		if stored != nil {
			next.PodSubnets = stored.PodSubnets
		}
		hasNewSubnet, _ = next.AddPodSubnets(own.PodSubnets...) // the plugin warns of too many
	}
	isElsewhere := hasPluginFile && next.ConfDir != own.ConfDir
	isWritten := changes || hasNewSubnet || isElsewhere
	if isWritten {
		next.ConfDir = own.ConfDir
	}
	return proposedNetwork{next, changes, isWritten}
}

// AddNetworks adds networks as Add does, and returns the errors of those that it does not add. Networks
// without a conflict are added together: policies are merged once for all of them, and two networks of a
// chain can change a value on which they must agree.
func (p *Proposal) AddNetworks(
	networks []policy.Source, disk func() Conflists, warn func(error),
) map[policy.SourceID]error {
	n := len(networks)
	if n == 1 {
		if err := p.Add(networks[0], disk, warn); err != nil {
			return map[policy.SourceID]error{networks[0].ID: err}
		}
		return nil
	}
	if n == 0 || p.addTogether(networks, disk, warn) {
		return nil
	}
	errs := map[policy.SourceID]error{}
	maps.Copy(errs, p.AddNetworks(networks[:n/2], disk, warn))
	maps.Copy(errs, p.AddNetworks(networks[n/2:], disk, warn))
	return errs
}

// addTogether adds networks unless one of them has a conflict to resolve, or a chain has too many rules then.
func (p *Proposal) addTogether(networks []policy.Source, disk func() Conflists, warn func(error)) bool {
	next, order := *p, lastOrder(p.Sources)
	var written []policy.Source
	var warnings []error
	keepWarning := func(err error) { warnings = append(warnings, err) }
	added, changedChains := map[policy.SourceID]bool{}, map[string]bool{}
	for _, own := range networks {
		network := p.network(own, order+1, disk, keepWarning)
		if network.source.Superseded {
			return false
		}
		if network.policyChanges {
			changedChains[network.source.Policy.Chain] = true
			order++
		}
		if network.isWritten {
			written = append(written, network.source)
		}
		added[network.source.ID] = true
	}
	if len(written) > 0 {
		next.set(written...)
	}
	for _, merged := range next.merged() {
		if loses(&merged, added) || changedChains[merged.Chain] && checkBounds(merged) != nil {
			return false
		}
	}
	for _, err := range warnings {
		warn(err)
	}
	*p = next
	return true
}

// loses reports whether one of these sources is superseded in a chain.
func loses(merged *policy.Policy, sources map[policy.SourceID]bool) bool {
	for _, e := range merged.Conflicts {
		if sources[e.Superseded.Source] {
			return true
		}
	}
	return false
}

// takeOver makes the proposal the next one, unless the chain of the changed source has too many rules then.
func (p *Proposal) takeOver(next Proposal, changed policy.Source) error {
	if err := checkBounds(next.mergedChain(changed.Policy.Chain)); err != nil {
		return fmt.Errorf("%s: %w", changed.ID, err)
	}
	*p = next
	return nil
}

// checkBounds returns an error if the policy has too many rules. For a backend that is still to be
// chosen, desireRules checks that.
func checkBounds(p policy.Policy) error {
	return p.CheckBounds(policy.Layout{Sets: p.Backend.Value != policy.IPTables})
}

func (p *Proposal) set(changed ...policy.Source) {
	p.Sources = WithSources(p.Sources, changed...)
	p.Changed = WithSources(p.Changed, changed...)
	p.policies = nil
}

// WithSources returns the list with sources added or replaced.
func WithSources(list []policy.Source, changed ...policy.Source) []policy.Source {
	ids := make(map[policy.SourceID]bool, len(changed))
	for _, c := range changed {
		ids[c.ID] = true
	}
	var others []policy.Source
	for _, x := range list {
		if !ids[x.ID] {
			others = append(others, x)
		}
	}
	return append(others, changed...)
}

func lastOrder(list []policy.Source) int64 {
	var last int64
	for _, c := range list {
		last = max(last, c.Order)
	}
	return last
}

// resolve resolves the conflicts that a network loses: the other network is superseded if it is in
// no conflist and this one is. The error is the conflicts that remain.
func (p *Proposal) resolve(own policy.Source, disk func() Conflists, warn func(error)) error {
	blocking := p.lostConflicts(own.ID)
	if len(blocking) > 0 && disk().HasEntry(own.ID.Name) {
		for _, e := range blocking {
			other := *p.Find(e.InForce.Source)
			if other.Superseded || !disk().LacksEntry(other.ID.Name) {
				continue
			}
			other.Superseded, own.Superseded = true, false
			p.set(other)
			p.set(own)
			warn(fmt.Errorf("%s is no longer in any conflist and is superseded by %s", other.ID, own.ID))
		}
		blocking = p.lostConflicts(own.ID)
	}
	if len(blocking) > 0 {
		return blocking
	}
	if own.Superseded {
		own.Superseded = false
		p.set(own)
	}
	return nil
}

// lostConflicts returns the conflicts in which the source is superseded.
func (p *Proposal) lostConflicts(id policy.SourceID) (lost policy.ConflictErrors) {
	for _, e := range p.mergedChain(p.Chain(id)).Conflicts {
		if e.Superseded.Source == id {
			lost = append(lost, e)
		}
	}
	return lost
}

func (p *Proposal) mergedChain(chain string) policy.Policy {
	for i := range p.merged() {
		if p.policies[i].Chain == chain {
			return p.policies[i]
		}
	}
	return policy.Policy{Chain: chain}
}

// merged returns the policies of all chains. It merges only after a source changed.
func (p *Proposal) merged() []policy.Policy {
	if p.policies == nil {
		p.policies = policy.Merge(p.Sources)
	}
	return p.policies
}

// UnwritableError is why documents cannot be written. The rules may be right nevertheless.
type UnwritableError struct{ Err error }

func (e *UnwritableError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *UnwritableError) Unwrap() error { return e.Err }

// ObserveProposal is Observe for what a proposal asks for.
func (e *Enforcer) ObserveProposal(ctx context.Context, p *Proposal, rec store.Record) *State {
	s := e.observe(ctx, p.merged(), rec)
	if len(s.Drift()) > 0 && !s.isRead() {
		s = e.ObserveAgain(ctx, s) // the dump may have been torn
	}
	if len(p.Lost) > 0 {
		s.keepWhatExists(store.State{Unreadable: p.Lost}.Newer())
	}
	return s
}
