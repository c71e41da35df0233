// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// unusableIfRefused asks the kernel, if a program failed with resourceProblem, whether it refuses for good what the
// program needs to list rules of a family and, if there are chains, to write them. Then the host is unusable
// (netfilter.ErrUnusable).
func unusableIfRefused(r reader, f policy.Family, chains []policy.Chain, err error) error {
	failed, is := errors.AsType[*failure](err)
	if !is || failed.status != resourceProblem {
		return err
	}
	refusal := r.refuses(f, chains)
	if refusal == nil {
		return err
	}
	return failed.withVerdict(netfilter.ErrUnusable, refusal.Error())
}

// lasts reports whether the kernel will refuse a second time, too. It may have no memory for a while.
func lasts(err error) bool {
	numbers := []unix.Errno{unix.EPERM, unix.EACCES, unix.ENOENT, unix.EROFS, unix.EINVAL,
		unix.EOPNOTSUPP, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT}
	for _, number := range numbers {
		if errors.Is(err, number) {
			return true
		}
	}
	return false
}

// refuses asks for the generation, which takes CAP_NET_ADMIN and nf_tables, and whether the kernel
// would accept rules of the kinds that the chains have.
func (r *nftReader) refuses(f policy.Family, chains []policy.Chain) error {
	_, err := r.conn.Generation()
	if err == nil && len(chains) > 0 {
		err = r.conn.Check(extensionBatch(f, chains))
	}
	if !lasts(err) {
		return nil
	}
	return fmt.Errorf("the kernel refuses it: %w", err)
}

// extensionBatch returns a batch, which is never committed, with one rule for each extension of
// xtables that the chains need. They are encoded as iptables-nft encodes them, in table nat, as
// MASQUERADE is accepted in a table of no other name.
func extensionBatch(f policy.Family, chains []policy.Chain) *nfnetlink.Batch {
	const chain, priority = "ip-masq-check", 100
	link := netfilter.LinkOf(f)
	var b nfnetlink.Batch
	b.AddTable(link, Table)
	base := &nfnetlink.Base{
		Type:     "nat",
		Hook:     unix.NF_INET_POST_ROUTING,
		Priority: priority,
		Policy:   nfnetlink.Accept,
	}
	b.AddChain(link, Table, chain, base)
	for _, e := range extensions(f, chains) {
		b.AddRule(link, Table, chain, []nfnetlink.Expr{e}, "")
	}
	return &b
}

func extensions(f policy.Family, chains []policy.Chain) []nfnetlink.Expr {
	const (
		commentSize   = 256 // struct xt_comment_info
		addrtypeSize  = 8   // struct xt_addrtype_info_v1
		statisticSize = 24  // struct xt_statistic_info; of zeros, never and at random
	)
	needed := []nfnetlink.Expr{
		nfnetlink.Match{Xt: "comment", Info: make([]byte, commentSize)},
		nfnetlink.Match{Xt: "addrtype", Rev: 1, Info: make([]byte, addrtypeSize)},
		nfnetlink.Target{Xt: "MASQUERADE", Info: translationOf(f)},
	}
	statistic, snat := false, false
	for _, c := range chains {
		for _, r := range c.Rules {
			statistic = statistic || r.Probability != 0
			snat = snat || r.Address.IsValid()
		}
	}
	if statistic {
		needed = append(needed, nfnetlink.Match{Xt: "statistic", Info: make([]byte, statisticSize)})
	}
	if snat {
		target := nfnetlink.Target{Xt: "SNAT", Info: translationOf(f)}
		if f == policy.IPv6 {
			target.Rev = 1
		}
		needed = append(needed, target)
	}
	return needed
}

// translationOf returns a translation to any address and port.
func translationOf(f policy.Family) []byte {
	const size4, size6 = 20, 40 // struct nf_nat_ipv4_multi_range_compat, struct nf_nat_range
	if f == policy.IPv6 {
		return make([]byte, size6)
	}
	info := make([]byte, size4)
	binary.NativeEndian.PutUint32(info, 1) // the number of ranges
	return info
}

// refuses asks for the file of the xtables lock: iptables-legacy uses that exit status for nothing
// else that lasts.
func (legacyReader) refuses(policy.Family, []policy.Chain) error {
	file, err := openXtablesLock()
	if file != nil {
		_ = file.Close()
	}
	if !lasts(err) {
		return nil
	}
	return fmt.Errorf("the lock %s cannot be taken: %w", lockFile, err)
}
