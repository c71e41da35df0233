// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// MaxChainName is the longest name of a chain. iptables ends at 28 characters.
const MaxChainName = 24

// ValidateChainName tells why a name cannot be that of a masquerade chain.
// It has to be possible in either backend, whichever the node ends up with.
func ValidateChainName(name string) error {
	switch {
	case name == "":
		return errors.New("is empty; leave the key out for " + DefaultChain)
	case strings.ContainsFunc(name, func(r rune) bool { return !isChainRune(r) }):
		return errors.New("may hold only letters, digits, '_', '.' and '-'")
	case len(name) > MaxChainName:
		return fmt.Errorf("has %d characters; at most %d are possible", len(name), MaxChainName)
	case strings.ContainsAny(name[:1], "_.-"):
		return errors.New("must begin with a letter or a digit")
	}
	upper := strings.ToUpper(name)
	if slices.Contains(reservedChainNames(), upper) {
		return fmt.Errorf("is the name of a built-in chain or target; choose one of your own, such as %s", DefaultChain)
	}
	for _, prefix := range []string{"KUBE-", "CNI-"} {
		if strings.HasPrefix(upper, prefix) {
			return fmt.Errorf("lies in the name space %s of others; choose another", prefix)
		}
	}
	return nil
}

func isChainRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_.-", r)
}

// reservedChainNames lists the built-in chains and the targets that iptables
// (extensions(8) included) gives a meaning of their own: `-j NAME` would reach
// the target, never the chain.
func reservedChainNames() []string {
	return []string{
		"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING",
		"ACCEPT", "DROP", "QUEUE", "RETURN", "JUMP", "GOTO", "ALL",
		"MASQUERADE", "SNAT", "DNAT", "REDIRECT", "NETMAP", "SAME", "NAT",
		"AUDIT", "CHECKSUM", "CLASSIFY", "CLUSTERIP", "CONNMARK", "CONNSECMARK", "CT",
		"DNPT", "DSCP", "ECN", "HL", "HMARK", "IDLETIMER", "LED", "LOG", "MARK", "MIRROR",
		"NFLOG", "NFQUEUE", "NOTRACK", "RATEEST", "REJECT", "SECMARK", "SET", "SNPT",
		"SYNPROXY", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS", "TPROXY", "TRACE", "TTL", "ULOG",
		"DELUDE", "TARPIT", "CHAOS", "STEAL", "SYSRQ", "ERROR", "STANDARD",
	}
}
