// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// exemptPods are the namespaces of the policies, and the addresses of their pods.
type exemptPods struct {
	namespaces []string
	pods       []store.ExemptPod // by address
	taken      map[store.Attachment][]netip.Addr
	own        []netip.Addr // of the pods of Attachments
}

// exemptPods returns the pods on record, after the records of Attachments were read again; or, if the record is for
// other namespaces, those of all attachments. An address belongs to the attachment of the latest ADD.
func (e *Enforcer) exemptPods(policies []policy.Policy, rec store.Record) (exemptPods, error) {
	x := exemptPods{taken: map[store.Attachment][]netip.Addr{}}
	for _, p := range policies {
		for _, n := range p.Namespaces {
			x.namespaces = append(x.namespaces, n.Name)
		}
	}
	if slices.Sort(x.namespaces); len(x.namespaces) == 0 {
		return x, nil
	}
	x.namespaces = slices.Compact(x.namespaces)
	holders := map[netip.Addr]store.ExemptPod{}
	claim := func(p store.ExemptPod) {
		held, other := holders[p.Address], p
		if held.At <= p.At {
			holders[p.Address], other = p, held
		}
		if held.Address.IsValid() && held.Attachment != p.Attachment {
			x.taken[other.Attachment] = append(x.taken[other.Attachment], p.Address)
		}
	}
	var pods []store.Pod
	var err error
	if !slices.Equal(x.namespaces, rec.Namespaces) {
		pods, _, err = e.Dir.Pods()
	} else {
		again := slices.Clone(e.Attachments)
		for _, p := range rec.Pods {
			if e.AllAttachments || slices.Contains(e.Attachments, p.Attachment) {
				again = append(again, p.Attachment)
			} else {
				claim(p)
			}
		}
		pods, err = e.readPods(again)
	}
	if err != nil {
		x.pods = rec.Pods
		return x, fmt.Errorf("read the records of pods: %w", err)
	}
	for _, p := range pods {
		if slices.Contains(e.Attachments, p.Attachment) {
			x.own = append(x.own, p.Addresses...)
		}
		for _, a := range p.Addresses {
			claim(store.ExemptPod{ExemptPod: policy.ExemptPod{Address: a, Namespace: p.Namespace}, Attachment: p.Attachment, At: p.At})
		}
	}
	for _, p := range holders {
		if slices.Contains(x.namespaces, p.Namespace) {
			x.pods = append(x.pods, p)
		}
	}
	slices.SortFunc(x.pods, func(a, b store.ExemptPod) int { return a.Address.Compare(b.Address) })
	return x, nil
}

// readPods reads the records of attachments, without those that are gone.
func (e *Enforcer) readPods(attachments []store.Attachment) (pods []store.Pod, err error) {
	slices.SortFunc(attachments, compareAttachments)
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

func compareAttachments(a, b store.Attachment) int {
	return cmp.Or(strings.Compare(a.Network, b.Network), strings.Compare(a.ContainerID, b.ContainerID), strings.Compare(a.IfName, b.IfName))
}

// PodsRecorded reports whether the record has the pods that are to be exempt. It reads no rules.
func (e *Enforcer) PodsRecorded(s store.State) bool {
	rec := e.currentBoot(s.Record)
	x, err := e.exemptPods(policy.Merge(s.Sources), rec)
	return err == nil && x.recorded(rec)
}

// recorded reports whether the record has these pods, and no attachment loses an address.
func (x *exemptPods) recorded(rec store.Record) bool {
	return len(x.taken) == 0 && slices.Equal(x.namespaces, rec.Namespaces) && slices.Equal(x.pods, rec.Pods)
}

// ExemptionChanges reports whether other addresses are to be exempt than on record, or for other attachments.
func (s *State) ExemptionChanges() bool {
	return len(s.exempt.taken) > 0 || !slices.Equal(s.exempt.pods, s.record.Pods)
}

// passed returns the addresses that pass to pods with another verdict. While the namespaces change, or their record was
// lost, only those of Attachments may do so: for other pods that is a change of the policy.
func (x *exemptPods) passed(rec store.Record) (addresses []netip.Addr) {
	without := func(pods, others []store.ExemptPod) {
		for _, p := range pods {
			if !slices.ContainsFunc(others, func(o store.ExemptPod) bool { return o.ExemptPod == p.ExemptPod }) {
				addresses = append(addresses, p.Address)
			}
		}
	}
	without(x.pods, rec.Pods)
	without(rec.Pods, x.pods)
	if slices.Equal(x.namespaces, rec.Namespaces) {
		return addresses
	}
	for _, taken := range x.taken {
		addresses = append(addresses, taken...)
	}
	return slices.DeleteFunc(addresses, func(a netip.Addr) bool { return !slices.Contains(x.own, a) })
}

// addPassed adds addresses to the reset for those that passed to other pods, of which there is one.
func addPassed(resets []store.Reset, addresses []netip.Addr) []store.Reset {
	if len(addresses) == 0 {
		return resets
	}
	others := slices.DeleteFunc(slices.Clone(resets), func(r store.Reset) bool {
		addresses = append(addresses, r.Passed...)
		return r.Passed != nil
	})
	slices.SortFunc(addresses, netip.Addr.Compare)
	return addReset(others, store.Reset{Passed: slices.Compact(addresses)})
}

// ExemptPods returns the number of pods that these policies exempt because of their namespaces.
func (s *State) ExemptPods(policies ...policy.Policy) int {
	containers := map[string]bool{}
	for _, p := range s.exempt.pods {
		names := func(n policy.NamedNamespace) bool { return n.Name == p.Namespace }
		if slices.ContainsFunc(policies, func(of policy.Policy) bool { return slices.ContainsFunc(of.Namespaces, names) }) {
			containers[p.ContainerID] = true
		}
	}
	return len(containers)
}

// Policies returns the policies that are in force by the documents.
func (e *Enforcer) Policies(s store.State) []policy.Policy {
	return policiesOf(s.Sources, e.currentBoot(s.Record).ExemptPods())
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
