// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// exemption is the namespaces of the policies, and the addresses of their pods.
type exemption struct {
	store.ExemptPods
	taken map[store.Attachment][]netip.Addr
	moved []netip.Addr // those of taken that another namespace had
	own   []netip.Addr // of the pods of Enforcer.Reread
}

// podListing is which records of pods are read.
type podListing int

const (
	// recordedPods are those of Enforcer.Reread, or of all attachments if the record is for other namespaces.
	recordedPods podListing = iota
	// allPods are those of all attachments.
	allPods
)

// desireExemption finds out which pods the policies exempt, and makes their addresses exempt sources. If the
// namespaces change, a list that is about too many pods is refused as a whole, by CheckBounds.
func (e *Enforcer) desireExemption(s *State, listing podListing) {
	var err error
	s.node.exempt, err = e.readExemption(s.Policies(), s.onRecord.now, listing)
	if listing == recordedPods || s.documents.restored {
		for i := range s.Chains {
			e.limitExemptPods(s, &s.Chains[i])
		}
	}
	for i := range s.Chains {
		c := &s.Chains[i]
		if len(c.Policy.Namespaces) > 0 {
			c.fail(err)
			c.Policy.SetExemptPods(s.node.exempt.Addresses())
			c.changed = c.changed || !s.node.exempt.recorded(s.onRecord.now)
		}
	}
}

// limitExemptPods leaves out pods, whose ADDs fail, if a chain may not have rules for all. A list of
// namespaces that is about more pods than that does not come into force.
func (e *Enforcer) limitExemptPods(s *State, c *Chain) {
	b, err := e.Drivers.Open(c.Choice)
	if err != nil || !slices.Equal(s.node.exempt.Namespaces, s.onRecord.now.Namespaces) {
		return
	}
	c.Policy.SetExemptPods(s.node.exempt.Addresses())
	tooMany := c.Policy.CheckBounds(b.Layout())
	if tooMany == nil || len(c.Policy.ExemptPods) <= policy.MaxExemptPods {
		return
	}
	c.overLimit, c.limitErr = nil, tooMany
	hasNoRoom := c.withoutRoom(s.node.exempt.Pods, s.onRecord.now.Pods)
	var stay []store.ExemptPod
	for _, p := range s.node.exempt.Pods {
		if hasNoRoom[p.Attachment] {
			c.overLimit = append(c.overLimit, p)
		} else {
			stay = append(stay, p)
		}
	}
	s.node.exempt.Pods = stay
}

// withoutRoom returns the attachments whose addresses do not fit into the chain. Each counts as a whole: a
// pod whose ADD fails must not be exempt by some of its addresses. Those on record come first, then the
// older ones: neither a pod whose ADD failed, nor the time of a file in the runtime's cache, takes the room
// of a pod that is exempt.
func (c *Chain) withoutRoom(pods, onRecord []store.ExemptPod) map[store.Attachment]bool {
	isNew := map[store.Attachment]bool{}
	for _, p := range podsWithout(pods, onRecord) {
		isNew[p.Attachment] = true
	}
	addresses := map[store.Attachment]int{}
	began := map[store.Attachment]int64{}
	for _, p := range c.exempted(pods) {
		addresses[p.Attachment]++
		began[p.Attachment] = p.At
	}
	inOrder := slices.SortedFunc(maps.Keys(addresses), func(x, y store.Attachment) int {
		switch {
		case isNew[x] == isNew[y]:
			return cmp.Or(cmp.Compare(began[x], began[y]), x.Compare(y))
		case isNew[x]:
			return 1
		default:
			return -1
		}
	})
	hasNoRoom := map[store.Attachment]bool{}
	room := policy.MaxExemptPods
	for _, a := range inOrder {
		if addresses[a] > room {
			hasNoRoom[a] = true
			continue
		}
		room -= addresses[a]
	}
	return hasNoRoom
}

// exempted returns the addresses for which the chain has a rule: of its families and namespaces.
func (c *Chain) exempted(pods []store.ExemptPod) []store.ExemptPod {
	named := map[string]bool{}
	for _, n := range c.Policy.Namespaces {
		named[n.Name] = true
	}
	var exempted []store.ExemptPod
	for _, p := range pods {
		if named[p.Namespace] && slices.Contains(c.Policy.Families(), policy.FamilyOf(p.Address)) {
			exempted = append(exempted, p)
		}
	}
	return exempted
}

// OverLimit returns the BoundError of the chain that cannot exempt one of these addresses, which no chain
// exempts then, or nil.
func (s *State) OverLimit(addresses []netip.Addr) error {
	for _, c := range s.Chains {
		for _, p := range c.overLimit {
			if slices.Contains(addresses, p.Address) {
				return c.limitErr
			}
		}
	}
	return nil
}

// PodsWithoutRoom returns an error for each chain that cannot exempt all pods of its namespaces.
func (s *State) PodsWithoutRoom() (errs []error) {
	for _, c := range s.Chains {
		containers := map[string]bool{}
		for _, p := range c.overLimit {
			containers[p.ContainerID] = true
		}
		if len(containers) > 0 {
			errs = append(errs, fmt.Errorf("%d of these pods are not exempt: %w", len(containers), c.limitErr))
		}
	}
	return errs
}

// readExemption finds out by the records of pods which pods the policies exempt.
func (e *Enforcer) readExemption(
	policies []policy.Policy, rec store.Record, listing podListing,
) (exemption, error) {
	namespaces := namespacesOf(policies)
	if len(namespaces) == 0 {
		return exemption{}, nil
	}
	if e.RereadAll || !slices.Equal(namespaces, rec.Namespaces) {
		listing = allPods
	}
	known, pods, err := e.readPods(rec, listing)
	if err != nil {
		return exemption{ExemptPods: store.ExemptPods{Namespaces: namespaces, Pods: rec.Pods}},
			fmt.Errorf("read the records of pods: %w", err)
	}
	x := owners(namespaces, known, pods)
	for _, p := range pods {
		if slices.Contains(e.Reread, p.Attachment) {
			x.own = append(x.own, p.Addresses...)
		}
	}
	return x, nil
}

// readPods reads records of pods. Known are the exempt pods by the stored record that are not read again.
func (e *Enforcer) readPods(
	rec store.Record, listing podListing,
) (known []store.ExemptPod, pods []store.Pod, err error) {
	if listing == allPods {
		pods, _, err = e.Dir.Pods()
		return nil, pods, err
	}
	again := slices.Clone(e.Reread)
	for _, p := range rec.Pods {
		if e.RereadExempt || slices.Contains(e.Reread, p.Attachment) {
			again = append(again, p.Attachment)
		} else {
			known = append(known, p)
		}
	}
	pods, err = e.podsOf(again)
	return known, pods, err
}

// namespacesOf returns the namespaces whose pods the policies exempt, sorted, each once.
func namespacesOf(policies []policy.Policy) []string {
	var namespaces []string
	for _, p := range policies {
		for _, n := range p.Namespaces {
			namespaces = append(namespaces, n.Name)
		}
	}
	slices.Sort(namespaces)
	return slices.Compact(namespaces)
}

// owners returns the pods of namespaces by the records of exempt addresses and of pods. An address belongs to
// the newest attachment that has it, and to one from the runtime's cache only if no other has it; taken are
// the others that have it. It is pure.
func owners(namespaces []string, known []store.ExemptPod, pods []store.Pod) exemption {
	x := exemption{taken: map[store.Attachment][]netip.Addr{}}
	x.Namespaces = namespaces
	holders := map[netip.Addr]store.ExemptPod{}
	for _, claim := range slices.Concat(known, claims(pods)) {
		held, isHeld := holders[claim.Address]
		loser := claim
		if !isHeld || precedes(claim, held) {
			holders[claim.Address] = claim
			loser = held
		}
		if isHeld && held.Attachment != claim.Attachment {
			x.taken[loser.Attachment] = append(x.taken[loser.Attachment], claim.Address)
			if held.Namespace != claim.Namespace {
				x.moved = append(x.moved, claim.Address)
			}
		}
	}
	for _, p := range holders {
		if slices.Contains(namespaces, p.Namespace) {
			x.Pods = append(x.Pods, p)
		}
	}
	slices.SortFunc(x.Pods, func(a, b store.ExemptPod) int { return a.Address.Compare(b.Address) })
	return x
}

// claims returns the addresses of pods, each with its pod.
func claims(pods []store.Pod) (claims []store.ExemptPod) {
	for _, p := range pods {
		for _, a := range p.Addresses {
			claims = append(claims, store.ExemptPod{
				ExemptPod:  policy.ExemptPod{Address: a, Namespace: p.Namespace},
				Attachment: p.Attachment, At: p.At, Cached: p.Cached,
			})
		}
	}
	return claims
}

// precedes reports whether an address belongs to the pod of a claim rather than to one that holds it.
func precedes(claim, held store.ExemptPod) bool {
	if claim.Cached != held.Cached {
		return held.Cached
	}
	return claim.At >= held.At
}

// podsOf reads the records of attachments, without those that are gone.
func (e *Enforcer) podsOf(attachments []store.Attachment) (pods []store.Pod, err error) {
	slices.SortFunc(attachments, store.Attachment.Compare)
	for _, a := range slices.Compact(attachments) {
		p, err := e.Dir.Pod(a)
		if err != nil {
			return nil, err
		}
		if p != nil {
			pods = append(pods, *p)
		}
	}
	return pods, nil
}

// PodsRecorded reports whether the record has the pods that are to be exempt. It reads no rules.
func (e *Enforcer) PodsRecorded(s store.State) bool {
	rec := e.currentBoot(s.Record)
	x, err := e.readExemption(policy.Merge(s.Sources), rec, recordedPods)
	return err == nil && x.recorded(rec)
}

// recorded reports whether the record has these pods, and no attachment loses an address.
func (x *exemption) recorded(rec store.Record) bool {
	return len(x.taken) == 0 && slices.Equal(x.Namespaces, rec.Namespaces) && slices.Equal(x.Pods, rec.Pods)
}

// ExemptionChanges reports whether other addresses are to be exempt than before the run, or for other
// attachments.
func (s *State) ExemptionChanges() bool {
	return len(s.node.exempt.taken) > 0 || !slices.Equal(s.node.exempt.Pods, s.onRecord.before.Pods)
}

// passed returns the addresses that pass to pods with another verdict. While the namespaces change, or their
// record was lost, only addresses of Enforcer.Reread count (own), and those that a pod of another namespace
// had (moved). That other addresses become exempt is a change of the policy then, whose reset is another one.
func (x *exemption) passed(rec store.Record) []netip.Addr {
	var passed []netip.Addr
	for _, p := range podsWithout(x.Pods, rec.Pods) {
		if !p.Cached { // else it had its address all the time
			passed = append(passed, p.Address)
		}
	}
	for _, p := range podsWithout(rec.Pods, x.Pods) {
		passed = append(passed, p.Address)
	}
	if slices.Equal(x.Namespaces, rec.Namespaces) {
		return passed
	}
	passedAnyway := slices.Clone(x.moved)
	for _, a := range passed {
		if slices.Contains(x.own, a) {
			passedAnyway = append(passedAnyway, a)
		}
	}
	return passedAnyway
}

// podsWithout returns the pods whose address and namespace no other one has.
func podsWithout(pods, others []store.ExemptPod) (missing []store.ExemptPod) {
	has := make(map[policy.ExemptPod]bool, len(others))
	for _, o := range others {
		has[o.ExemptPod] = true
	}
	for _, p := range pods {
		if !has[p.ExemptPod] {
			missing = append(missing, p)
		}
	}
	return missing
}

// CountExemptPods returns the number of pods that these policies exempt because of their namespaces.
func (s *State) CountExemptPods(policies ...policy.Policy) int {
	namespaces := namespacesOf(policies)
	containers := map[string]bool{}
	for _, p := range s.node.exempt.Pods {
		if slices.Contains(namespaces, p.Namespace) {
			containers[p.ContainerID] = true
		}
	}
	return len(containers)
}

// Policies returns the policies that are in force by the documents.
func (e *Enforcer) Policies(s store.State) []policy.Policy {
	return policiesOf(s.Sources, e.currentBoot(s.Record).Addresses())
}

// policiesOf merges sources on a node with these exempt pods.
func policiesOf(sources []policy.Source, pods []policy.ExemptPod) []policy.Policy {
	policies := policy.Merge(sources)
	for i := range policies {
		policies[i].SetExemptPods(pods)
	}
	return policies
}

// chainOf returns the first chain that has a source in its scope, else the first one.
func chainOf(policies []policy.Policy, a netip.Addr) (chain string) {
	for _, p := range policies {
		if p.Scope(policy.FamilyOf(a)).Sources.Contains(a) {
			return p.Chain
		}
		chain = cmp.Or(chain, p.Chain)
	}
	return chain
}
