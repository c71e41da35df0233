// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"errors"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Attachment is an interface of a container in a network.
type Attachment struct {
	Network     string `json:"network"`
	ContainerID string `json:"container"`
	IfName      string `json:"interface"`
}

// Compare orders by network, container and interface.
func (a Attachment) Compare(b Attachment) int {
	return cmp.Or(
		strings.Compare(a.Network, b.Network),
		strings.Compare(a.ContainerID, b.ContainerID),
		strings.Compare(a.IfName, b.IfName),
	)
}

func (a Attachment) file() string { return hashName("attachment", a.ContainerID, a.IfName) }

// cachedSuffix ends the name of a record from the runtime's cache. It is a file beside that of an ADD, which
// counts while no ADD has written its own whole: so neither the reconciler nor an ADD needs a lock to replace
// it. Such a pod takes no address from one that had an ADD, as the cache can be older than it looks.
const cachedSuffix = ".cached"

// Pod is the record of an attachment's pod, written by its ADD or from the runtime's cache.
type Pod struct {
	Attachment
	// At is the time of the ADD, CLOCK_BOOTTIME in nanoseconds: of two pods with one address the later one
	// has it.
	At              int64
	Namespace, Name string // "" if they are not known
	Addresses       []netip.Addr
	Cached          bool // the attachment had no ADD of ip-masq; At is that of the runtime's file
}

func (p Pod) file() string {
	if p.Cached {
		return p.Attachment.file() + cachedSuffix
	}
	return p.Attachment.file()
}

// encode returns the record, a line for each field: encoding/json would take each ADD 50 µs. No field has a
// new line, by the rules of CNI and Kubernetes; one that has spoils this record alone.
func (p Pod) encode() []byte {
	lines := []string{strconv.FormatInt(p.At, 10), p.Network, p.ContainerID, p.IfName, p.Namespace, p.Name}
	for _, a := range p.Addresses {
		lines = append(lines, a.String())
	}
	return []byte(strings.Join(lines, "\n") + "\n")
}

// decodePod decodes a record that was written whole, and returns nil for any other.
func decodePod(data []byte) *Pod {
	const fields = 6
	text, whole := strings.CutSuffix(string(data), "\n")
	lines := strings.Split(text, "\n")
	if !whole || len(lines) < fields {
		return nil
	}
	at, err := strconv.ParseInt(lines[0], 10, 64)
	if err != nil {
		return nil
	}
	p := &Pod{
		Attachment: Attachment{Network: lines[1], ContainerID: lines[2], IfName: lines[3]},
		At:         at, Namespace: lines[4], Name: lines[5],
	}
	for _, line := range lines[fields:] {
		if line == "" { // see overwrite
			continue
		}
		a, err := netip.ParseAddr(line)
		if err != nil {
			return nil
		}
		p.Addresses = append(p.Addresses, a)
	}
	return p
}

// ofBoot opens the directory of what is valid in this boot, or one in it.
func (d *Dir) ofBoot(create bool, names ...string) (*folder, error) {
	boot, err := d.boot()
	if err != nil {
		return nil, err
	}
	return d.descend(create, append([]string{attachmentsDir, boot}, names...)...)
}

func networkName(network string) string { return hashName("network", network) }

// withinNetwork runs a function on the directory of a network's attachments, unless that is missing or
// removed meanwhile.
func (d *Dir) withinNetwork(name string, do func(*folder) error) error {
	f, err := d.ofBoot(false, networkName(name))
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	return ignoring(do(f), os.ErrNotExist)
}

// BootTime returns the time since the boot in nanoseconds.
func BootTime() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) // supported since Linux 2.6.39
	return max(1, t.Nano())
}

// Attach records an attachment with its pod. It takes no lock and syncs nothing: attachments are valid in
// this boot only. A repeated call replaces the record.
func (d *Dir) Attach(p Pod) error {
	const attempts = 100
	p.At = BootTime()
	for attempt := 1; ; attempt++ {
		err := d.attach(p)
		wasRemoved := errors.Is(err, os.ErrNotExist) // a directory, before it was used
		if !wasRemoved || attempt == attempts {
			return err
		}
	}
}

func (d *Dir) attach(p Pod) error {
	f, err := d.ofBoot(true, networkName(p.Network))
	if err != nil {
		return err
	}
	defer f.close()
	return f.createPod(p)
}

// CheckAttach returns why Attach would refuse a directory, or that the kernel does not tell the boot. It
// creates nothing, and does not ask whether files can be written.
func (d *Dir) CheckAttach(network string) error {
	return d.withinNetwork(network, func(*folder) error { return nil })
}

// AttachCached records a pod from the runtime's cache, unless its attachment has the record of an ADD. It
// returns whether it did. A record from the cache is replaced by a rename: at no time is there none, also if
// the disk is full.
func (d *Dir) AttachCached(p Pod) (recorded bool, err error) {
	p.Cached = true
	f, err := d.ofBoot(true, networkName(p.Network))
	if err != nil {
		return false, err
	}
	defer f.close()
	before, err := f.pod(p.Attachment.file())
	if err != nil {
		return false, err
	}
	hadADD := before != nil && !before.Cached
	if hadADD {
		return false, nil
	}
	temp, err := f.stage(writeAttachment, p.file(), p.encode(), overwrite)
	if err != nil {
		return false, err
	}
	if err := f.replace(writeAttachment, temp, p.file()); err != nil {
		return false, errors.Join(err, f.remove(temp))
	}
	return true, nil
}

// DetachCached removes a record from the runtime's cache.
func (d *Dir) DetachCached(a Attachment) error {
	return d.withinNetwork(a.Network, func(f *folder) error { return f.remove(a.file() + cachedSuffix) })
}

const writeAttachment = "write attachment"

// createPod writes a record, and creates it if it is missing. Readers take no lock: one that is empty or torn
// counts as none, and its ADD has not read the documents yet.
func (f *folder) createPod(p Pod) error {
	file, err := f.create(writeAttachment, p.file(), p.file())
	if errors.Is(err, os.ErrExist) {
		return f.updatePod(p)
	}
	if err != nil {
		return err
	}
	return failure(writeAttachment, f.in(p.file()), overwrite(file, p.encode()))
}

// updatePod writes a record that exists, in place: its DEL, which takes no lock, may remove it at any time.
func (f *folder) updatePod(p Pod) error {
	file, _, err := f.open(writeAttachment, p.file(), unix.O_RDWR)
	if err != nil {
		return err
	}
	return failure(writeAttachment, f.in(p.file()), overwrite(file, p.encode()))
}

// Detach removes an attachment of this boot. It is no error if there is none, and creates nothing.
func (d *Dir) Detach(a Attachment) error {
	return d.withinNetwork(a.Network, func(f *folder) error {
		return errors.Join(f.remove(a.file()), f.remove(a.file()+cachedSuffix))
	})
}

// Attached reports whether an attachment of this boot had an ADD, also if its record cannot be used.
func (d *Dir) Attached(a Attachment) (had bool, err error) {
	err = d.withinNetwork(a.Network, func(f *folder) error {
		had = f.has(a.file())
		return nil
	})
	return had, err
}

// Pod returns the record of an attachment of this boot, or nil if there is none that can be used.
func (d *Dir) Pod(a Attachment) (p *Pod, err error) {
	err = d.withinNetwork(a.Network, func(f *folder) (err error) {
		p, err = f.pod(a.file())
		return err
	})
	return p, err
}

// pod returns the record of an attachment: that of its ADD or, without one that was written whole, that from
// the cache.
func (f *folder) pod(attachment string) (*Pod, error) {
	for _, name := range []string{attachment, attachment + cachedSuffix} {
		data, err := f.read(name)
		err = ignoring(err, os.ErrNotExist, ErrRefused)
		if err != nil {
			return nil, err
		}
		p := decodePod(data)
		if p != nil && p.Attachment.file() == attachment {
			p.Cached = name != attachment
			return p, nil
		}
	}
	return nil, nil
}

// attachments returns the file of each attachment in the directory of a network, sorted. With an error there
// may be others.
func (f *folder) attachments() ([]string, error) {
	names, err := f.names()
	var attachments []string
	for _, name := range names {
		attachment := strings.TrimSuffix(name, cachedSuffix)
		if isHash(attachment) {
			attachments = append(attachments, attachment)
		}
	}
	// The names are sorted, so the record of an ADD and the cached one are neighbours.
	return slices.Compact(attachments), err
}

// Pods returns the records of all attachments of this boot, and how many attachments have none.
func (d *Dir) Pods() (pods []Pod, without int, err error) {
	all, err := d.ofBoot(false)
	if err != nil {
		return nil, 0, ignoring(err, os.ErrNotExist)
	}
	defer all.close()
	names, err := all.names()
	errs := []error{err}
	for _, name := range names {
		if !isHash(name) {
			continue
		}
		errs = append(errs, all.within(name, func(network *folder) error {
			some, lacking, err := network.pods()
			pods = append(pods, some...)
			without += lacking
			return err
		}))
	}
	return pods, without, errors.Join(errs...)
}

// pods returns the records in the directory of a network, and how many attachments have none.
func (f *folder) pods() (pods []Pod, without int, err error) {
	attachments, err := f.attachments()
	errs := []error{err}
	for _, attachment := range attachments {
		p, err := f.pod(attachment)
		errs = append(errs, err)
		if p == nil {
			without++
		} else {
			pods = append(pods, *p)
		}
	}
	return pods, without, errors.Join(errs...)
}

// TakeAddresses removes addresses from the records of attachments that lost them to other attachments.
func (l *Lock) TakeAddresses(taken map[Attachment][]netip.Addr) error {
	var errs []error
	// In an order that is always the same: simulations take the same steps again.
	for _, a := range slices.SortedFunc(maps.Keys(taken), Attachment.Compare) {
		errs = append(errs, l.dir.withinNetwork(a.Network, func(f *folder) error {
			return f.takeAddresses(a, taken[a])
		}))
	}
	return errors.Join(errs...)
}

func (f *folder) takeAddresses(a Attachment, taken []netip.Addr) error {
	p, err := f.pod(a.file())
	if p == nil {
		return err
	}
	var left []netip.Addr
	for _, address := range p.Addresses {
		if !slices.Contains(taken, address) {
			left = append(left, address)
		}
	}
	p.Addresses = left
	return f.updatePod(*p)
}

// Attachments returns the number of the network's attachments in this boot, and when it last changed:
// the mtime of their directory, or the zero Time if there was none in this boot.
func (d *Dir) Attachments(network string) (n int, changed time.Time, err error) {
	err = d.withinNetwork(network, func(f *folder) error {
		attachments, err := f.attachments()
		if err != nil {
			return err
		}
		n = len(attachments)
		changed, err = f.changed()
		return err
	})
	return n, changed, err
}

// Prune removes the network's attachments of this boot except those to keep, whose Network does not matter,
// and creates nothing.
func (d *Dir) Prune(network string, keep []Attachment) error {
	var kept []string
	for _, a := range keep {
		kept = append(kept, a.file(), a.file()+cachedSuffix)
	}
	return d.withinNetwork(network, func(f *folder) error { return f.clear(kept...) })
}
