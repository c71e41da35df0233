// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
)

// Namespaces are the items of nonMasqueradeNamespaces: names of Kubernetes namespaces, without duplicates.
type Namespaces []string

const namespacesKey = "nonMasqueradeNamespaces"

// findNamespace returns the namespace of this name, or nil.
func findNamespace(all []NamedNamespace, name string) *NamedNamespace {
	for i := range all {
		if all[i].Name == name {
			return &all[i]
		}
	}
	return nil
}

// ParseNamespace accepts the name of a Kubernetes namespace, a label of RFC 1123.
func ParseNamespace(s string) (string, error) {
	switch {
	case s == "":
		return "", errors.New("is empty; write the name of a namespace, or drop the item")
	case len(s) > 63 || !isLabel(s):
		return "", errors.New("is not a name of a Kubernetes namespace, which has at most 63 of a-z, 0-9 and -, " +
			"and begins and ends with a letter or digit; patterns are not possible")
	}
	return s, nil
}

// IsPodName reports whether a text can be the name of a Kubernetes pod, a subdomain of RFC 1123.
func IsPodName(s string) bool {
	notLabel := func(label string) bool { return !isLabel(label) }
	return len(s) <= 253 && !slices.ContainsFunc(strings.Split(s, "."), notLabel)
}

func isLabel(s string) bool {
	outside := func(r rune) bool { return (r < 'a' || 'z' < r) && (r < '0' || '9' < r) && r != '-' }
	return s != "" && !strings.ContainsFunc(s, outside) && s[0] != '-' && s[len(s)-1] != '-'
}

// ExemptPod is an address of a pod of a namespace.
type ExemptPod struct {
	Address   netip.Addr `json:"address"`
	Namespace string     `json:"namespace"`
}

// SetExemptPods makes the pods of the policy's namespaces exempt sources. The pods have different addresses.
func (p *Policy) SetExemptPods(pods []ExemptPod) {
	p.ExemptPods = nil
	for _, pod := range pods {
		named := findNamespace(p.Namespaces, pod.Namespace)
		if named == nil || !slices.Contains(p.Families(), FamilyOf(pod.Address)) {
			continue
		}
		all := netip.PrefixFrom(pod.Address, pod.Address.BitLen())
		p.ExemptPods = append(p.ExemptPods, PrefixAction{all, ActionExempt, named.Origins})
	}
}
