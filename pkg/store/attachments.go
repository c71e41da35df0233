// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Attachment is an interface of a container in a network.
type Attachment struct {
	Network     string `json:"network"`
	ContainerID string `json:"container"`
	IfName      string `json:"interface"`
}

func (a Attachment) file() string { return hashName("attachment", a.ContainerID, a.IfName) }

// Pod is what the ADD of an attachment records of its pod.
type Pod struct {
	Attachment
	At        int64        `json:"at"` // of the ADD, CLOCK_BOOTTIME in nanoseconds; of two with one address the later one has it
	Namespace string       `json:"namespace,omitempty"`
	Name      string       `json:"name,omitempty"`
	Addresses []netip.Addr `json:"addresses,omitempty"`
}

// network opens the directory of a network's attachments in this boot.
func (d *Dir) network(name string, create bool) (*folder, error) {
	boot, err := d.boot()
	if err != nil {
		return nil, err
	}
	return d.descend(create, attachmentsDir, boot, hashName("network", name))
}

// Attach records an attachment with its pod. It takes no lock and syncs nothing: attachments are valid in this boot
// only. A repeated call replaces the record.
func (d *Dir) Attach(p Pod) error {
	const attempts = 100
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // supported since Linux 2.6.39
	p.At = now.Nano()
	data, err := json.Marshal(p)
	for range attempts { // a directory can be removed before it is used
		var f *folder
		if f, err = d.network(p.Network, true); err == nil {
			err = f.putPod(p.file(), data)
			f.close()
		}
		if !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return err
}

// putPod writes a record whole, as readers take no lock. An empty one is about to be filled, by an ADD that has not read
// the documents yet.
func (f *folder) putPod(name string, data []byte) error {
	const op = "write attachment"
	file, err := f.create(op, name, name)
	temp := name
	if errors.Is(err, os.ErrExist) {
		if file, _, err = f.open(op, name, unix.O_RDONLY); err != nil {
			return err
		}
		_ = file.Close() // nothing was written
		temp = safefile.TempName(name + ".")
		file, err = f.create(op, temp, name)
	}
	if err != nil {
		return err
	}
	if err = failure(op, f.in(name), write(file, data)); err == nil && temp != name {
		err = f.replace(op, temp, name)
	}
	if err != nil {
		err = errors.Join(err, f.remove(temp))
	}
	return err
}

// write writes a file, and closes it.
func write(file *os.File, data []byte) error {
	_, err := file.Write(data)
	return errors.Join(err, file.Close())
}

// Detach removes an attachment of this boot. It is no error if there is none, and creates nothing.
func (d *Dir) Detach(a Attachment) error {
	f, err := d.network(a.Network, false)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	return f.remove(a.file())
}

// Pod returns the record of an attachment of this boot, or nil if there is none that can be used.
func (d *Dir) Pod(a Attachment) (*Pod, error) {
	f, err := d.network(a.Network, false)
	if err != nil {
		return nil, ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	return f.pod(a.file())
}

func (f *folder) pod(name string) (*Pod, error) {
	data, err := f.read(name)
	if err != nil {
		return nil, ignoring(err, os.ErrNotExist, ErrRefused)
	}
	p := &Pod{}
	if damaged := json.Unmarshal(data, p); damaged != nil || p.file() != name {
		p = nil
	}
	return p, nil
}

// Pods returns the records of all attachments of this boot, and how many attachments have none.
func (d *Dir) Pods() (pods []Pod, without int, err error) {
	boot, err := d.boot()
	if err != nil {
		return nil, 0, err
	}
	all, err := d.descend(false, attachmentsDir, boot)
	if err != nil {
		return nil, 0, ignoring(err, os.ErrNotExist)
	}
	defer all.close()
	networks, err := all.names()
	for _, network := range networks {
		if !isHash(network) {
			continue
		}
		errNetwork := all.within(network, func(f *folder) error {
			names, err := f.names()
			for _, name := range names {
				if _, unknown := f.recognize(inNetwork, name); unknown != nil || !isHash(name) {
					continue
				}
				p, errPod := f.pod(name)
				if err = errors.Join(err, errPod); p == nil {
					without++
				} else {
					pods = append(pods, *p)
				}
			}
			return err
		})
		err = errors.Join(err, ignoring(errNetwork, os.ErrNotExist)) // it may have been removed meanwhile
	}
	return pods, without, err
}

// TakeAddresses removes addresses from the records of attachments, which have lost them to others.
func (l *Lock) TakeAddresses(taken map[Attachment][]netip.Addr) error {
	var errs []error
	for a, addresses := range taken {
		f, err := l.dir.network(a.Network, false)
		if err != nil {
			errs = append(errs, ignoring(err, os.ErrNotExist))
			continue
		}
		p, err := f.pod(a.file())
		if err == nil && p != nil {
			p.Addresses = slices.DeleteFunc(p.Addresses, func(x netip.Addr) bool { return slices.Contains(addresses, x) })
			var data []byte
			if data, err = json.Marshal(p); err == nil {
				err = f.putPod(a.file(), data)
			}
		}
		f.close()
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Attachments returns the number of the network's attachments in this boot, and when it last changed:
// the mtime of their directory, or the zero Time if there was none in this boot.
func (d *Dir) Attachments(network string) (n int, changed time.Time, err error) {
	f, err := d.network(network, false)
	if err != nil {
		return 0, time.Time{}, ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	names, err := f.names()
	if err == nil {
		changed, err = f.changed()
	}
	names = slices.DeleteFunc(names, func(name string) bool { return !isHash(name) }) // temporary files
	return len(names), changed, ignoring(err, os.ErrNotExist)                         // it may have been removed since it was opened
}

// Prune removes the network's attachments of this boot except those to keep, whose Network does not matter, and creates
// nothing.
func (d *Dir) Prune(network string, keep []Attachment) error {
	f, err := d.network(network, false)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	kept := make([]string, len(keep))
	for i, a := range keep {
		kept[i] = a.file()
	}
	return ignoring(f.clear(inNetwork, kept...), os.ErrNotExist) // it may have been removed since it was opened
}
